"""Pictures and pages of results; everything here shows what the library computed and computes
nothing itself.
"""
