"""Pictures of timelines: terminal text, PNG and SVG, an offline HTML page, a Perfetto trace."""
