"""Where ranks run: as threads of one process (`simulated`) or as processes of their own (`gloo`, `nccl`)."""
