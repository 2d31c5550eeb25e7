"""Transport: messages between process 0 and the others."""
