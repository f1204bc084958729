"""Mathematics with a checkable answer: word problems, competition problems, multiple choice."""
