"""The tensor parallel plans that transformers ships, as the lowest layer of a plan."""
