# frozen_string_literal: true

module Torch
  module Distributed
    # A key-value store by which processes find each other and agree on small things. Keys and values are
    # strings of bytes; a key may be a symbol. Calls that wait can be interrupted, let other threads run,
    # and raise {TimeoutError} when the store's {#timeout} is over.
    #
    # @!method set(key, value)
    #   Stores a value, replacing what was there.
    # @!method get(key)
    #   Waits for a key.
    #   @return [String] its value
    # @!method add(key, delta)
    #   Adds to a counter that is kept as decimal text; an absent one counts as 0.
    #   @return [Integer] the new total
    # @!method compare_set(key, expected, desired)
    #   Stores `desired` if the present value is `expected` (an absent key equals an empty one).
    #   @return [String] `desired` if it was stored, else the present value
    # @!method delete_key(key)
    #   @return [Boolean] whether the key was there
    # @!method num_keys
    #   @return [Integer] how many keys there are, the store's own among them
    # @!method wait(keys, timeout = nil)
    #   Returns once all keys exist.
    #   @param timeout [Numeric, nil] seconds; nil: the store's own
    # @!method check(keys)
    #   @return [Boolean] whether all keys exist now
    # @!method append(key, value)
    #   Adds bytes to the end of a value, or makes it.
    # @!method multi_get(keys)
    #   @return [Array<String>] the values, once all keys exist
    # @!method multi_set(keys, values)
    #   Stores several values.
    # @!method close
    #   Lets go of the connection, and of the server if this process is the master. No other thread may be using
    #   the store.
    # @!attribute timeout
    #   @return [Float] how many seconds its calls wait
    class Store
      class << self
        # Store stands for its kinds; only they can be made.
        def new(*args, **options)
          return super unless equal?(Store)

          raise NotImplementedError, "Store is abstract: use TCPStore, FileStore, HashStore or PrefixStore"
        end
      end

      # PyTorch's name for {#timeout=}.
      # @param seconds [Numeric]
      def set_timeout(seconds) # standard:disable Naming/AccessorMethodName
        self.timeout = seconds
      end

      def inspect
        "#<#{self.class.name}>"
      end

      # @api private
      # @return [Integer] how many groups this process made on this store before
      def next_group
        @groups = (@groups || -1) + 1
      end

      # Stores hold connections and are shared by reference.
      # @raise [TypeError] always
      def initialize_copy(_other)
        raise TypeError, "a #{self.class.name} cannot be copied"
      end
    end

    # A store served by one process over TCP, in the protocol of PyTorch's TCPStore.
    class TCPStore < Store
      # @!attribute [r] host
      #   @return [String] the server's host
      # @!attribute [r] port
      #   @return [Integer] the server's port, the real one where 0 was given

      # @param host [String] name or address of the process that serves
      # @param port [Integer] its port; 0 on the master lets the system choose
      # @param world_size [Integer, nil] clients that will come; nil: unknown, nobody is waited for
      # @param is_master [Boolean] whether this process serves
      # @param wait_for_workers [Boolean] whether the master waits until all clients are there
      # @param timeout [Numeric] seconds, of this call and of the store's later ones
      def initialize(host, port, world_size = nil, is_master = false, wait_for_workers: true, timeout: DEFAULT_TIMEOUT)
        super()
        _open(host, port, world_size, is_master, wait_for_workers, timeout)
      end

      def inspect
        "#<#{self.class.name} #{host}:#{port}>"
      end
    end

    # A store kept in a file, for processes of one machine. Use a fresh path for each run.
    class FileStore < Store
      # @return [String] the file
      attr_reader :path

      # @param path [String] made when absent
      # @param world_size [Integer, nil] after so many have let go of it the file is removed
      # @param timeout [Numeric] seconds that its calls wait
      def initialize(path, world_size = nil, timeout: DEFAULT_TIMEOUT)
        super()
        @path = path.to_s.dup.freeze
        _open(@path, world_size, timeout)
      end
    end

    # A store inside this process, for threads and tests.
    class HashStore < Store
      # @param timeout [Numeric] seconds that its calls wait
      def initialize(timeout: DEFAULT_TIMEOUT)
        super()
        _open(timeout)
      end
    end

    # A view of another store in which key "k" is "prefix/k".
    class PrefixStore < Store
      # @return [String]
      attr_reader :prefix

      # @param prefix [String]
      # @param store [Store]
      def initialize(prefix, store)
        super()
        @prefix = prefix.to_s.dup.freeze
        _open(@prefix, store)
      end
    end
  end
end
