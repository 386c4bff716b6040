"""From scheduled TIR to source, PTX, machine code and resources; everything but running, without a GPU."""
