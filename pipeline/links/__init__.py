"""How ranks reach each other: as threads of one process, or as processes under torch.distributed."""
