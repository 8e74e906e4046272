"""What must hold of an implementation, one file a property or a family; `catalogue` lists them."""
