"""Where models and batches come from. Heavy libraries are imported here, inside the functions that need them."""
