"""Workers of packages in environments of their own, a file each, and the pinned requirements of these environments."""
