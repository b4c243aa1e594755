"""Answer extraction: functions from the text of a response to the answer in it."""
