"""Private and version-dependent names of other libraries, one module per library; no other module uses such names.

Every name is a `LibraryName`, which says what it is for and which versions had it. Importing these modules imports no
library. A missing name, or one without a parameter that headscope passes, raises IncompatibleLibrary.
"""
