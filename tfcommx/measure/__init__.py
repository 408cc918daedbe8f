"""What a cluster and a model cost, by measurement."""
