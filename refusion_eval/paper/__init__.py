"""The paper's tables and figures, drawn from records: published figures beside measured ones, never alike."""
