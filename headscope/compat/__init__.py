"""Private and version-dependent names of other libraries, one module per library; no other module uses such names.

Required names are declared as `LibraryName`, with their use and the tested versions of the library; optional fields and
keyword arguments are plain strings. Importing these modules imports no library. A missing required name, or one without
a parameter that headscope passes, raises IncompatibleLibrary; without torch's CPU kernel headscope warns and uses
public functions.
"""
