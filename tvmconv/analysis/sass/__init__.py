"""What is read off a kernel's machine code, alone and beside the text that it is made of."""
