"""What computes a tile: fused ops where the device, the dtype and the shape allow it, else plain tensor operations."""
