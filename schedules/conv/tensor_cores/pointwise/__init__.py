"""Gradients of narrow 1×1 layers: dgrads whose pixels stream through registers, and wgrads whose sums stay in them."""
