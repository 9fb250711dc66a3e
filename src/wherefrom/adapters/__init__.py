"""Models of other libraries as this one takes them: their schedulers, their networks and their
pipelines.
"""
