"""What GPU instructions do, one kind a file."""
