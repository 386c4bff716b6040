"""Translation of TIR to Python functions, once per execution, which the emulator then calls repeatedly."""
