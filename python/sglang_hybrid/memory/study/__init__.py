"""The AVMP paper as an experiment: its allocators, its workloads, its metric, and the columns that metric leaves out."""
