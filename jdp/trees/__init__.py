"""Trees: the leaves of pytrees, and how they are packed."""
