"""The script that writes the texts of trainings: what it makes of HTML and of Perl's documentation."""

from headscope.prompts import packaged_texts as texts


def test_of_html_the_text_is_left_a_line_a_block() -> None:
    page = (
        "<html><head><title>T</title></head><BODY class=x><!-- no -->\n<h1>Of <i>cats</i></h1>"
        "<script>if (a < b) { }</script><p>1 &lt; 2<br/>and more</p><ul><li>one<li>two</ul></BODY></html>"
    )
    assert texts.text_from_html(page) == "Of cats\n\n1 < 2\nand more\n\none\ntwo\n"


def test_of_pod_the_text_is_left_without_commands_and_marks() -> None:
    page = "=head1 NAME\n\nperl - see L<perlrun> and C<< -w >>\n\n=over 4\n\n=item B<-e>\n\n=back\n\n=cut\n"
    assert texts.text_from_pod(page) == "NAME\n\nperl - see perlrun and -w\n\n4\n\n-e\n"


def test_tidy_text_has_no_loose_ends() -> None:
    assert texts.normalize_whitespace("\n a \t\n\n\n\nb  \n\n") == "a\n\nb\n"
