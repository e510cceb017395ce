"""The subcommands of ``pipeloom``, one a module; ``pipeline.cli`` lists them and says what a module holds."""
