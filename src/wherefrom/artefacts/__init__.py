"""What is kept on disk: folders that say what they are of, written whole or not at all, and read
only by what they belong to.
"""
