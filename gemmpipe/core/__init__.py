"""Values and system services that everything else uses; imports nothing else of gemmpipe's."""
