"""ZeRO: what data-parallel ranks hold of a stage's parameters, gradients and optimizer state."""
