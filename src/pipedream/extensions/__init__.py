"""What the library can do besides its core: one folder for each extension, which may be deleted.

The core imports none of them. It looks for the files by which an extension offers something
(`pipedream.core.extensions`). An extension imports the core, and no other extension.
"""
