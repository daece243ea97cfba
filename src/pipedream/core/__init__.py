"""The ground floor: nouns, and the arithmetic that several wings share. Standard library only."""
