"""Tables and limits: what the project costs, measured."""
