"""The Dash app: explores stored runs through the findings and charts of probes. It imports no torch.

The URL is the state: a page is a function of the run and the URL, so a copied link shows the same view.
"""

from headscope.compat.dash import import_only

COMPONENTS = {
    "dash_mantine_components": (
        "Autocomplete Button InputWrapper MantineProvider MultiSelect NumberInput RangeSlider SegmentedControl "
        "Select TextInput Textarea"
    ),
    "dash.html": (
        "A Article Aside B Bdi Br Button Canvas Caption Code Dd Details Div Dl Dt Fieldset Figcaption Figure Form "
        "H1 H2 H3 Header Label Legend Li Main Nav Option P Pre Section Select Span Summary Table Tbody Td Tfoot Th "
        "Thead Tr Ul"
    ),
}
"""The components that the app uses, by package, separated by spaces."""

import_only(COMPONENTS)  # before a module of the app imports Dash
