vcl 4.1;

backend files {
    .host = "127.0.0.1";
    .port = "@nginx@";
}

# Nothing is cached: every request takes both hops.
sub vcl_recv {
    return (pass);
}
