"""Mixed precision: in which type each layer computes, and the scale that keeps fp16 gradients in range."""
