# Makes the scripts that complete torchrun's command line: cmake -DPROGRAM=... -DTO=... -P make.cmake
execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE FLAGS COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "'" "\\'" FLAGS_IN_QUOTES "${FLAGS}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/torchrun.bash ${TO}/bash-completion/completions/torchrun @ONLY)
configure_file(${CMAKE_CURRENT_LIST_DIR}/torchrun.zsh ${TO}/zsh/site-functions/_torchrun @ONLY)
configure_file(${CMAKE_CURRENT_LIST_DIR}/torchrun.fish ${TO}/fish/vendor_completions.d/torchrun.fish @ONLY)
