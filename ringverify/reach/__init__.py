"""Did context parallelism happen: what a model's outputs read, and compute, on several ranks and on one."""
