"""The operations of epilogues, one a file; a file that is added here is found."""
