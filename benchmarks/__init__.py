"""What takes longer than a test, or needs a quiet machine: one module a question, run with ``python -m``."""
