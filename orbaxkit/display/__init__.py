"""What people see of a checkpoint: plain text, JSON, and HTML for notebooks, from specs and plain header rows."""
