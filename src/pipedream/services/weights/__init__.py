"""The values that a session begins with: those of the model, drawn, or of files; and the memory for them."""
