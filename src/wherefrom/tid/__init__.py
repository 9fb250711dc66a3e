"""TID, the exact teacher."""
