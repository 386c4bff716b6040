"""What a kernel does to memory, counted from its lowered text: banks, sectors, requests, bytes."""
