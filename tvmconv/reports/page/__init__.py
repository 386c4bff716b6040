"""The page of `tvmconv report`, one self-contained HTML file."""
