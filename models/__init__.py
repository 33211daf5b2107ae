"""The models that ship with laneway; see README.md beside this file."""
