"""The AVMP paper as an experiment: its allocators, workloads and metric, and the columns that metric leaves out."""
