"""The operators, one a file; a file that is added here is found."""
