"""How data-parallel ranks exchange what they share: between nodes on parts, and compressed where a link is slow."""
