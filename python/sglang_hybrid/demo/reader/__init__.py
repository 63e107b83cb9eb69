"""Two small models that read: the language of their documents, their networks, training and evaluation."""
