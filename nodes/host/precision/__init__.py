"""Models of the host in dtypes of one's own, beside the models that they were made of."""
