"""What a plan is made from, measured: the links of the cluster."""
