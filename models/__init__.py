"""Models to run, and how to prepare them."""
