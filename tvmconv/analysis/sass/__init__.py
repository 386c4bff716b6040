"""Analysis of a kernel's machine code (SASS): instruction mix, loops, pipeline model, and links to the sources."""
