"""What executes a stage."""
