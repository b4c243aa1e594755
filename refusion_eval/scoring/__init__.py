"""From the text of a response to a verdict."""
