"""Machine code, executed as far as addresses and branches need: what each instruction asks of memory."""
